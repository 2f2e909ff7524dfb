"""Who asks for steps: the loops behind generate(), and the forward of a patched model."""
