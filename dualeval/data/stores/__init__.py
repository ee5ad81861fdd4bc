"""Files in object stores and on the web, read by ranges and never written.

``path.py`` has such a file as code takes it that reads any; ``requests.py`` asks again where that may help.
A kind of store is a file: ``web.py``, and ``arrow.py`` for S3, Google's and Azure's.
"""
