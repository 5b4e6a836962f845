"""Tests of vocab/merges."""
