"""A Hugging Face Hub and its Xet store in one small process, for the unmodified clients.

It speaks, over plain HTTP on 127.0.0.1, what ``huggingface_hub`` and ``hf_xet`` ask of the Hub when
they work with buckets, and what an S3 client asks of the Hub's S3 gateway. Everything is kept in
memory. Sources of what it says:

* the bucket API: huggingface_hub (``hf_api.py``, ``_buckets.py``, ``_bucket_live_follow.py``);
* Xet: hub-docs ``docs/xet`` and xet-core ``openapi/cas.openapi.yaml``;
* the S3 gateway: hub-docs ``docs/hub/storage-buckets-s3.md``.

==============  =============================================================
``web``         requests, responses, routes: what HTTP needs, without sockets
``server``      the sockets
``hub``         the state of one Hub, and who may do what in it
``access``      accounts and the two kinds of tokens
``store``       buckets, their files, and the stream of their changes
``cas``         xorbs and files: Xet's store, without HTTP
``xet, lz4``    Xet's binary formats: bytes in, values out
``bucket_api``  ``/api/buckets/…`` and ``/buckets/…/resolve/…``
``cas_api``     ``/v1/xorbs/…``, ``/v2/shards``, ``/v2/reconstructions/…``
``s3_api``      ``/s3/<namespace>/<bucket>/<key>``
``control``     ``/_stats`` and ``/_faults``: what tests measure and break
``process``     the server in a process of its own, as tests want it
==============  =============================================================
"""
