"""What a class of transformers computes: found out by looking at it and by running it, before it is replaced."""
