"""Models behind HTTP, in OpenAI's words."""
