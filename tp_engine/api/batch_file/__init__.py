"""Files of OpenAI batch requests: their lines, the endpoints these name, and the lines of results."""
