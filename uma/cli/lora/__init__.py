"""``uma lora``: one module for each command, and what they share."""
