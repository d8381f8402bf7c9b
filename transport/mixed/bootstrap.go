package mixed

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"
)

// Through returns an Exchange over a connection with a process that runs [Collect], such as the parent: a socket or a
// pair of pipes. The end of ctx does not interrupt it; closing the connection does.
func Through(parent io.ReadWriter) Exchange {
	return func(_ context.Context, mine []byte) ([][]byte, error) {
		if err := writeRegistration(parent, mine); err != nil {
			return nil, err
		}
		n, err := readLength(parent, processesMax)
		if err != nil {
			return nil, err
		}
		var all [][]byte
		for range n {
			c, err := readRegistration(parent)
			if err != nil {
				return nil, err
			}
			all = append(all, c)
		}
		return all, nil
	}
}

// Collect receives one registration from each child, and sends all of them to each. It is the counterpart of [Through].
func Collect(children []io.ReadWriter) error {
	all := make([][]byte, len(children))
	errs := make([]error, len(children))
	var wg sync.WaitGroup
	for i, c := range children {
		wg.Go(func() { all[i], errs[i] = readRegistration(c) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	for i, c := range children {
		wg.Go(func() {
			errs[i] = writeLength(c, len(all))
			for _, text := range all {
				if errs[i] == nil {
					errs[i] = writeRegistration(c, text)
				}
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// processesMax bounds the number of registrations that a process accepts.
const processesMax = 1 << 16

func writeLength(w io.Writer, n int) error {
	_, err := w.Write(binary.LittleEndian.AppendUint32(nil, uint32(n)))
	return err
}

func readLength(r io.Reader, most int) (int, error) {
	var b [4]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return 0, err
	}
	n := binary.LittleEndian.Uint32(b[:])
	if int64(n) > int64(most) {
		return 0, fmt.Errorf("mixed: a registration or list of length %d, want at most %d", n, most)
	}
	return int(n), nil
}

func writeRegistration(w io.Writer, text []byte) error {
	_, err := w.Write(append(binary.LittleEndian.AppendUint32(nil, uint32(len(text))), text...))
	return err
}

func readRegistration(r io.Reader) ([]byte, error) {
	n, err := readLength(r, registrationMax)
	if err != nil {
		return nil, err
	}
	text, err := io.ReadAll(io.LimitReader(r, int64(n))) // allocates for received data only, not for the claimed length
	if err == nil && len(text) < n {
		err = io.ErrUnexpectedEOF
	}
	return text, err
}
