"""What `python -m radixkv` does beside the demo: doctor and bench."""
