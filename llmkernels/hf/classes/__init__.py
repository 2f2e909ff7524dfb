"""What a class computes: found out by looking at it and by running it, before it is replaced."""
