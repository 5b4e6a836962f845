"""Rotary positions: rotations of channel pairs, their scalings and axes, and their configuration."""
