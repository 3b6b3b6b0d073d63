"""What scripts/accuracy.py is made of: rows read, mapped, predicted and summed up."""
