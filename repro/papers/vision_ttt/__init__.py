"""Vision-TTT (arXiv:2603.00518), the paper that this project reproduces."""
