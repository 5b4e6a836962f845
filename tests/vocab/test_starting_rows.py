"""Tests of vocab/starting_rows."""
