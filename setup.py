"""The package list; all metadata stands in pyproject.toml.

`radixkv/kernels`, `radixkv/integration` and `radixkv/bench` are symlinks to the folders at the top, which have no `__init__.py`
(a top-level package called `kernels` would hide Hugging Face's own), so the packages are named here one by one.
"""

from setuptools import setup

setup(
    packages=["radixkv", "radixkv.kernels", "radixkv.integration", "radixkv.bench", "radixkv.commands", "radixkv.demo"],
    package_data={"radixkv": ["py.typed", "report_page/*"], "radixkv.demo": ["documents/*.toml"]},
)
