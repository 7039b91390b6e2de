"""Where AITER keeps `mla_decode_fwd`; filled by `aiter.use_release`."""
