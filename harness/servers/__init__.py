"""Processes that answer the OpenAI HTTP API."""
