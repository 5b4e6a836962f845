"""Tests of vocab/pieces."""
