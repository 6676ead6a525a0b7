"""The daemon: owns the pool, the directory, the sessions of attached engines and the copies between pool and engines."""
