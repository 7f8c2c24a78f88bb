from __future__ import annotations

import os

# torch's store looks up the names of its peers; a resolver that drops a query would cost 5 s now and then.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
