package bench

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"
)

// PeerResult is a size in the output of another program.
type PeerResult struct {
	Bytes  int
	Median time.Duration // or the mean, if the program prints that
	BusBW  float64       // GB/s, as in [Result]; 0: the output has none
	// PerRank reports that Bytes is what each rank contributes, for each other rank in an all-to-all: the whole vector is
	// as many times larger as there are ranks.
	PerRank bool
}

// peerLineMax bounds a line of a peer's output.
const peerLineMax = 1 << 20

// ReadPeer reads measurements of the same collective by another program: the text output of nccl-tests (the columns out
// of place) or of the OSU micro-benchmarks, or the output of lockstep bench in any format. format
// names the program.
func ReadPeer(r io.Reader) (results []PeerResult, format string, err error) {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, peerLineMax)
	perRank := false
	for n := 1; lines.Scan(); n++ {
		line := strings.TrimSpace(lines.Text())
		kind, one, err := readPeerLine(line, format)
		switch {
		case err != nil:
			return nil, "", fmt.Errorf("line %d: %w", n, err)
		case kind != "" && format != "" && kind != format:
			return nil, "", fmt.Errorf("line %d: output of %s after that of %s: want one program's", n, kind, format)
		case kind != "":
			format = kind
		}
		if kind == formatOSU {
			perRank = osuPerRank(line)
		}
		if one != nil {
			one.PerRank = perRank
			results = append(results, *one)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, "", err
	}
	if len(results) == 0 {
		return nil, "", fmt.Errorf("no measurements: want the text output of nccl-tests or of the OSU micro-benchmarks, or " +
			"the output of lockstep bench")
	}
	return results, format, nil
}

// osuPerRank reports whether the benchmark with this head prints sizes per rank: those of osu_allgather and
// osu_alltoall, while osu_reduce_scatter divides its size by the ranks, and others have one vector.
func osuPerRank(head string) bool {
	head = strings.ToLower(head)
	return strings.Contains(head, "allgather") || strings.Contains(head, "alltoall")
}

// The formats that [ReadPeer] knows.
const (
	formatNCCLTests = "nccl-tests"
	formatOSU       = "OSU"
	formatLockstep  = "lockstep"
)

// readPeerLine reads a line. kind is the format that the line shows, or empty; one is nil for a line without a
// measurement.
func readPeerLine(line, format string) (kind string, one *PeerResult, err error) {
	fields := strings.Fields(line)
	switch {
	case len(fields) == 0:
		return "", nil, nil
	case strings.HasPrefix(line, "# OSU"):
		return formatOSU, nil, nil
	case strings.HasPrefix(line, "#"):
		if strings.Contains(line, "algbw") && strings.Contains(line, "busbw") {
			if strings.Contains(line, "best") {
				return formatLockstep, nil, nil
			}
			return formatNCCLTests, nil, nil
		}
		return "", nil, nil
	case strings.HasPrefix(line, "{"):
		one, err = readPeerJSON(line)
		return formatLockstep, one, err
	case strings.HasPrefix(line, "lockstep") && len(fields) > 1:
		one, err = readPeerPlain(fields)
		return formatLockstep, one, err
	}
	if _, err := strconv.Atoi(fields[0]); err != nil {
		return "", nil, nil // a message of a launcher
	}
	switch format {
	case formatNCCLTests:
		one, err = readPeerNCCL(fields)
	case formatOSU:
		one, err = readPeerColumns(fields[0], fields[min(1, len(fields)-1)], "")
	case formatLockstep:
		one, err = readPeerTable(fields)
	}
	return "", one, err
}

func readPeerJSON(line string) (*PeerResult, error) {
	var r struct {
		Bytes  *int          `json:"bytes"`
		Median time.Duration `json:"median_ns"`
		BusBW  float64       `json:"busbw"`
	}
	if err := json.Unmarshal([]byte(line), &r); err != nil {
		return nil, err
	}
	if r.Bytes == nil || *r.Bytes < 0 || r.Median <= 0 || r.BusBW < 0 {
		return nil, fmt.Errorf("want an object of lockstep bench, with bytes, median_ns and busbw")
	}
	return &PeerResult{Bytes: *r.Bytes, Median: r.Median, BusBW: r.BusBW}, nil
}

// readPeerPlain reads NAME ranks=N bytes=B us=T.
func readPeerPlain(fields []string) (*PeerResult, error) {
	values := map[string]string{}
	for _, f := range fields {
		name, value, _ := strings.Cut(f, "=")
		values[name] = value
	}
	return readPeerColumns(values["bytes"], values["us"], "")
}

// readPeerNCCL reads size, count, type, redop, root, time, algbw, busbw, … of nccl-tests; some operations have no
// redop or root, but all have the time after the texts.
func readPeerNCCL(fields []string) (*PeerResult, error) {
	const head, measured = 5, 3 // size, count, type, redop, root; time, algbw, busbw
	if len(fields) < head+measured {
		return nil, fmt.Errorf("%d columns: want size, count, type, redop, root, time, algbw, busbw, …", len(fields))
	}
	return readPeerColumns(fields[0], fields[head], fields[head+2])
}

// readPeerTable reads size, count, time, best, algbw, busbw of lockstep bench --format table.
func readPeerTable(fields []string) (*PeerResult, error) {
	const columns = 6
	if len(fields) < columns {
		return nil, fmt.Errorf("%d columns: want size, count, time, best, algbw, busbw", len(fields))
	}
	return readPeerColumns(fields[0], fields[2], fields[5])
}

// readPeerColumns reads a size in bytes, a time in microseconds and a bandwidth in GB/s; empty: none.
func readPeerColumns(size, micros, busBW string) (*PeerResult, error) {
	bytes, err := strconv.Atoi(size)
	if err != nil || bytes < 0 {
		return nil, fmt.Errorf("size %q: want bytes", size)
	}
	const most = 1e15 // µs: some decades
	us, err := strconv.ParseFloat(micros, 64)
	if err != nil || !(us > 0 && us < most) {
		return nil, fmt.Errorf("time %q: want microseconds", micros)
	}
	r := &PeerResult{Bytes: bytes, Median: time.Duration(us * float64(time.Microsecond))}
	if busBW != "" {
		if r.BusBW, err = strconv.ParseFloat(busBW, 64); err != nil || !(r.BusBW >= 0 && r.BusBW < most) {
			return nil, fmt.Errorf("bus bandwidth %q: want GB/s", busBW)
		}
	}
	return r, nil
}
