"""Decode attention whose mask and score rule are ordinary Python functions."""
