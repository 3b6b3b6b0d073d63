"""A GGUF file turned into an MLX model folder.

``metadata`` and ``config`` read the keys, ``names`` maps the tensors, ``tensors`` converts their
blocks, ``weights`` writes them, ``pretokenizers``, ``vocabulary`` and ``tokenizer`` rebuild the
tokenizer, ``convert`` does all of it.
"""
