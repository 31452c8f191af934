"""Class-conditional image generation by diffusion."""
