"""Data sets on disk, their manifests, and loaders whose order and augmentation depend on (seed, epoch, index) alone."""
