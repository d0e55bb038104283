"""The vLLM plugin: what our code does inside the API server, the engine core and every worker.

Only vLLM's own libraries may be imported here, and those late: the folder is staged under the package name
``servelab_kernels`` and never sees the rest of the project.
"""
