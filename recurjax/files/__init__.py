"""Reading and writing files: atomic writes, untrusted JSON, buckets."""
