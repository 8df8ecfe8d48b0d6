"""Predictions over HTTP: a model in, a FastAPI app out.

`models` loads a part and computes margins of a few rows at a time; `service` reads and answers a request, independent
of HTTP, and has the API keys; `app` is the web application. Only `app` needs the packages of the extra ``web``.
"""
