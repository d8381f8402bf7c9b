package collective

// The functions below serve other implementations of [Communicator], such as those over MPI and NCCL.

// Check validates the call for one rank of a communicator of the given size. It returns the number of
// elements of the whole vector.
func (c *Call) Check(rank, size int) (count int, err error) {
	o := Options{}
	if c.Options != nil {
		o = *c.Options
	}
	return c.check(rank, size, &o)
}

// Part returns the range [lo, hi) of the elements that belong to the rank, in a vector of count elements on a
// communicator of the given size. Check must have accepted the call.
func (c *Call) Part(rank, size, count int) (lo, hi int) { return c.part(rank, size, count) }

// Fill returns the configuration with its defaults filled in. It fails if a field is invalid.
func (c Config) Fill() (Config, error) { return c.filled() }
