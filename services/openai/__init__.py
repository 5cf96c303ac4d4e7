"""OpenAI's API: what may be asked (types), how an answer is run, streamed, cited and counted, and the routes."""
