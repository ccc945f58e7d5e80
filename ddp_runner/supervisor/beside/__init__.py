"""The parent's side of what a run can do without; each part uses the kernel's ports, and the kernel imports none."""
