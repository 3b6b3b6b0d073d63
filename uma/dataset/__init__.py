"""What a data set holds: rows, masks, lengths, batches and packs. Pure: nothing here needs MLX."""
