"""The command `vllm-lazy-grammar`: what the gate would do, what it did, and whether it can."""
