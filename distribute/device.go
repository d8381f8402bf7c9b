package distribute

import (
	"fmt"
	"strconv"
	"strings"
)

// Device is a device name in TensorFlow's form. Make one with [ParseDevice] or [CanonicalDevice].
type Device struct {
	Job     string // "" if not given
	Replica int    // -1 if not given
	Task    int    // -1 if not given
	Kind    string // "CPU", "GPU", "TPU" or another kind of the engine; "" if not given
	Index   int    // among devices of the same kind; -1 if not given
}

// localCPU completes partial device strings.
var localCPU = Device{Job: "localhost", Kind: "CPU"}

// ParseDevice parses a device string (TensorFlow's DeviceSpec.from_string). It accepts short forms such as "CPU:0",
// "/gpu:1" or "cpu", and any part of the full form "/job:worker/replica:0/task:0/device:CPU:1". "*" leaves an index
// open. Short forms exist for CPU, GPU and TPU; other kinds need "/device:KIND:0".
func ParseDevice(s string) (Device, error) {
	d := Device{Replica: -1, Task: -1, Index: -1}
	bad := func(format string, args ...any) (Device, error) {
		return Device{}, errorf("ParseDevice", ErrInvalid, format, args...)
	}
	for _, part := range strings.Split(s, "/") {
		fields := strings.Split(part, ":")
		key := fields[0]
		switch {
		case part == "":
		case key == "job" && len(fields) == 2 && fields[1] != "":
			d.Job = fields[1]
		case (key == "replica" || key == "task") && len(fields) == 2:
			n, err := parseIndex(fields[1])
			if err != nil {
				return bad("%s in the device spec '%s': %w", key, s, err)
			}
			if key == "replica" {
				d.Replica = n
			} else {
				d.Task = n
			}
		case key == "device" && len(fields) == 3, isDeviceKind(key) && len(fields) <= 2:
			if d.Kind != "" {
				return bad("multiple device types are not allowed while parsing the device spec: '%s'", s)
			}
			if key == "device" {
				fields = fields[1:]
			}
			if !isIdentifier(fields[0]) {
				return bad("'%s' in the device spec '%s' is not a device type: want a name such as CPU, GPU or TPU", fields[0], s)
			}
			d.Kind = strings.ToUpper(fields[0])
			if len(fields) == 2 {
				n, err := parseIndex(fields[1])
				if err != nil {
					return bad("device index in the device spec '%s': %w", s, err)
				}
				d.Index = n
			}
		default:
			return bad("unknown attribute '%s' is encountered while parsing the device spec: '%s'. Want a form such as CPU:0, "+
				"/gpu:1 or /job:localhost/replica:0/task:0/device:CPU:0", key, s)
		}
	}
	return d, nil
}

// CanonicalDevice parses s (TensorFlow's device_util.canonicalize). Missing parts are taken from defaults, device
// strings in order of precedence, and then from /job:localhost/replica:0/task:0/device:CPU:0.
func CanonicalDevice(s string, defaults ...string) (Device, error) {
	d, err := ParseDevice(s)
	if err != nil {
		return Device{}, err
	}
	for _, def := range defaults {
		f, err := ParseDevice(def)
		if err != nil {
			return Device{}, err
		}
		d = d.fill(f)
	}
	return d.fill(localCPU), nil
}

// String returns the parts that are given, in TensorFlow's full form.
func (d Device) String() string {
	var b strings.Builder
	if d.Job != "" {
		b.WriteString("/job:" + d.Job)
	}
	if d.Replica >= 0 {
		b.WriteString("/replica:" + strconv.Itoa(d.Replica))
	}
	if d.Task >= 0 {
		b.WriteString("/task:" + strconv.Itoa(d.Task))
	}
	if d.Kind != "" {
		b.WriteString("/device:" + d.Kind + ":")
		if d.Index >= 0 {
			b.WriteString(strconv.Itoa(d.Index))
		} else {
			b.WriteByte('*')
		}
	}
	return b.String()
}

// Short returns the kind and the index: "CPU:0".
func (d Device) Short() string { return fmt.Sprintf("%s:%d", d.Kind, max(d.Index, 0)) }

// local reports whether the device belongs to this process.
func (d Device) local() bool { return d.Job == "localhost" && d.Task == 0 }

func (d Device) fill(f Device) Device {
	if d.Job == "" {
		d.Job = f.Job
	}
	if d.Replica < 0 {
		d.Replica = f.Replica
	}
	if d.Task < 0 {
		d.Task = f.Task
	}
	if d.Kind == "" {
		d.Kind = f.Kind
	}
	if d.Index < 0 {
		d.Index = f.Index
	}
	return d
}

func parseIndex(s string) (int, error) {
	if s == "*" {
		return -1, nil
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 0 || strings.HasPrefix(s, "+") {
		return 0, fmt.Errorf("'%s' is not an index", s)
	}
	return n, nil
}

// isDeviceKind reports whether s is a kind that has a short form.
func isDeviceKind(s string) bool {
	return strings.EqualFold(s, "CPU") || strings.EqualFold(s, "GPU") || strings.EqualFold(s, "TPU")
}

// isIdentifier reports whether s is a letter, followed by letters, digits and underscores.
func isIdentifier(s string) bool {
	for i, r := range s {
		letter := 'a' <= r && r <= 'z' || 'A' <= r && r <= 'Z'
		if !letter && (i == 0 || r != '_' && (r < '0' || r > '9')) {
			return false
		}
	}
	return s != ""
}
