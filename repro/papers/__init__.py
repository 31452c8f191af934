"""One room for each paper that this project compares itself with."""
