"""What a request's tools and `tool_choice` ask for: families of call formats, and the grammar and triggers of one request."""
