"""Tests of vocab/transplant."""
