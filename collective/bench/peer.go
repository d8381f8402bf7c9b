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

// peerLine is what a line of a peer's output shows.
type peerLine struct {
	format  string         // empty: the line does not show one
	columns map[string]int // of a table whose head the line is: where a column is, by its name
	what    string         // what a line of lockstep bench measures: operation, dtype and reduction, as far as it says
	result  *PeerResult    // nil: no measurement
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
	var columns map[string]int
	what := ""
	for n := 1; lines.Scan(); n++ {
		line := strings.TrimSpace(lines.Text())
		p, err := readPeerLine(line, format, columns)
		switch {
		case err != nil:
			return nil, "", fmt.Errorf("line %d: %w", n, err)
		case p.format != "" && format != "" && p.format != format:
			return nil, "", fmt.Errorf("line %d: output of %s after that of %s: want one program's", n, p.format, format)
		case p.format != "":
			format = p.format
		}
		if p.format == formatOSU {
			perRank = osuPerRank(line)
		}
		if p.columns != nil {
			if format == formatLockstep && len(results) > 0 {
				return nil, "", fmt.Errorf("line %d: a second table: want one operation", n)
			}
			columns = p.columns
		}
		if p.result != nil {
			if p.what != "" && what != "" && p.what != what {
				return nil, "", fmt.Errorf("line %d: a measurement of %s after those of %s: want one operation of one type", n,
					p.what, what)
			}
			what = p.what
			p.result.PerRank = perRank
			results = append(results, *p.result)
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

// readPeerLine reads a line. format is that of the lines before, columns that of the last table's head.
func readPeerLine(line, format string, columns map[string]int) (p peerLine, err error) {
	fields := strings.Fields(line)
	switch {
	case len(fields) == 0:
		return p, nil
	case strings.HasPrefix(line, "# OSU"):
		return peerLine{format: formatOSU}, nil
	case strings.HasPrefix(line, "#"):
		if strings.Contains(line, "algbw") && strings.Contains(line, "busbw") {
			if strings.Contains(line, "best") {
				return peerLine{format: formatLockstep, columns: readPeerHead(line)}, nil
			}
			return peerLine{format: formatNCCLTests}, nil
		}
		return p, nil
	case strings.HasPrefix(line, "{"):
		p.format = formatLockstep
		p.what, p.result, err = readPeerJSON(line)
		return p, err
	case strings.HasPrefix(line, "lockstep") && len(fields) > 1:
		p.format = formatLockstep
		p.what, p.result, err = readPeerPlain(fields)
		return p, err
	}
	if _, err := strconv.Atoi(fields[0]); err != nil {
		return p, nil // a message of a launcher
	}
	switch format {
	case formatNCCLTests:
		p.result, err = readPeerNCCL(fields)
	case formatOSU:
		p.result, err = readPeerColumns(fields[0], fields[min(1, len(fields)-1)], "")
	case formatLockstep:
		p.what, p.result, err = readPeerTable(fields, columns)
	}
	return p, err
}

// readPeerHead returns where each column of a table is.
func readPeerHead(line string) map[string]int {
	columns := map[string]int{}
	for i, name := range strings.Fields(strings.TrimPrefix(line, "#")) {
		columns[name] = i
	}
	return columns
}

func readPeerJSON(line string) (what string, one *PeerResult, err error) {
	var r struct {
		Op     string        `json:"op"`
		Type   string        `json:"dtype"`
		Reduce string        `json:"reduce"`
		Bytes  *int          `json:"bytes"`
		Median time.Duration `json:"median_ns"`
		BusBW  float64       `json:"busbw"`
	}
	if err := json.Unmarshal([]byte(line), &r); err != nil {
		return "", nil, err
	}
	if r.Bytes == nil || *r.Bytes < 0 || r.Median <= 0 || r.BusBW < 0 {
		return "", nil, fmt.Errorf("want an object of lockstep bench, with bytes, median_ns and busbw")
	}
	return peerWhat(r.Op, r.Type, r.Reduce), &PeerResult{Bytes: *r.Bytes, Median: r.Median, BusBW: r.BusBW}, nil
}

// peerWhat describes what was measured, by what is known.
func peerWhat(texts ...string) string {
	return strings.Join(strings.Fields(strings.Join(texts, " ")), " ")
}

// readPeerPlain reads NAME ranks=N bytes=B us=T.
func readPeerPlain(fields []string) (what string, one *PeerResult, err error) {
	values := map[string]string{}
	for _, f := range fields {
		name, value, _ := strings.Cut(f, "=")
		values[name] = value
	}
	one, err = readPeerColumns(values["bytes"], values["us"], "")
	return peerWhat(values["op"], values["dtype"], values["reduce"]), one, err
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

// readPeerTable reads a row of lockstep bench --format table by its head, which names at least size, time and busbw.
func readPeerTable(fields []string, columns map[string]int) (what string, one *PeerResult, err error) {
	cell := func(name string) string {
		if i, ok := columns[name]; ok && i < len(fields) {
			return fields[i]
		}
		return ""
	}
	if len(fields) < len(columns) {
		return "", nil, fmt.Errorf("%d columns: want %d, as the head of the table has", len(fields), len(columns))
	}
	one, err = readPeerColumns(cell("size"), cell("time"), cell("busbw"))
	return peerWhat(cell("type"), cell("redop")), one, err
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
