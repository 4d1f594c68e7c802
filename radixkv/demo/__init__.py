"""The demo, `python -m radixkv demo`: the main job on a real language model, unpatched and patched side by side."""
