"""Files of OpenAI batch requests: their lines, the endpoints that they name, and the lines of results."""
