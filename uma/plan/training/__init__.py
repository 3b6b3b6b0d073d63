"""What a fine-tuning needs, whether it fits, and what would make it fit."""
