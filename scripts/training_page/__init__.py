"""What the tables of docs/training-memory.md are made of."""
