"""The OpenAI Responses API on top of chats: its bodies become chat bodies, chat answers become its items and events."""
