// Package doctor checks a job before training: that every pair of workers can connect, how fast each link is,
// and that the workers' environments match.
//
// The check joins the job like any program does (package worker), so it runs under every launcher that
// supports training. Each pair of workers is then tested over a communicator of two ranks: the transport, the
// round-trip time, the bandwidth in each direction, and the clock offset. With up to eight workers, one pair
// is tested at a time. With more, as many pairs as possible are tested concurrently, each worker in one pair.
// A pair that does not respond in time is reported, and the other pairs continue.
package doctor
