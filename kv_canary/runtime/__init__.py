"""The runtime that an engine installs: what is kept on the device, what is launched around a forward, what is found."""
