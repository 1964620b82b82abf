"""What is read and written: whole or not at all, JSON from outside, buckets."""
