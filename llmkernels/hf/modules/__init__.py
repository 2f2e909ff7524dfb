"""What patched modules run in the place of their own forwards: norms, rotations, MLPs, LoRA layers, the loss."""
