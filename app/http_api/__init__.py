"""The HTTP API: OpenAI's chat completions over one `app.online.service.Service`."""
