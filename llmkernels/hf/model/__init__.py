"""What a model computes, as data, and whether its modules may be left uncalled."""
