"""Predictions over HTTP: a model in, a FastAPI app out.

`models` loads a part and computes margins of rows that come one at a time; `requests` makes rows of JSON; `service`
answers a request without knowing HTTP; `keys` says who may ask; `app` is the web application, `server` listens. Nothing
here but `app`, `metrics` and `server` needs the packages of the extra ``web``.
"""
