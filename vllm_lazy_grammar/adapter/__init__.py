"""The classes and functions that face vLLM; importing this package alone imports nothing of it."""
