"""The front ends of real checkpoints, and the files that tables travel in."""
