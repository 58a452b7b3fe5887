"""What a grammar in waiting is made of; knows no engine and no vLLM."""
