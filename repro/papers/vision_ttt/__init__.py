"""Everything that belongs to the paper Vision-TTT alone."""
