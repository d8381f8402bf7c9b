package mpi

import (
	"fmt"
	"strings"

	"github.com/lockstep-ml/lockstep/collective"
	"github.com/lockstep-ml/lockstep/internal/foreign"
	"github.com/lockstep-ml/lockstep/tensor"
)

// abi is how a library is called: the addresses of its functions, and its handles and constants. Handles are
// pointers in Open MPI, and ints in MPICH and its derivatives (MVAPICH, Intel MPI, Cray), which have agreed
// on their values (the MPICH ABI initiative). Both fit a machine word, and both libraries read an int from
// its lower half.
type abi struct {
	library foreign.Library
	f       functions

	world        uintptr
	errorsReturn uintptr
	statusIgnore uintptr
	types        map[tensor.DType]uintptr
	ops          map[collective.ReduceOp]uintptr
}

// functions are the addresses of MPI's functions.
type functions struct {
	initialized, initThread, queryThread, finalized, finalize uintptr

	commRank, commSize, commSplit, commFree, setErrhandler, errorString uintptr

	iallreduce, ireduce, ibcast, iallgatherv, igatherv, iscatterv uintptr

	ireduceScatter, ialltoallv, ibarrier, isend, irecv, test uintptr
}

// Constants that are the same in all libraries.
const (
	threadFunneled = 1
	undefined      = -32766 // MPI_UNDEFINED of Open MPI and MPICH
	errorTextMax   = 1024   // MPI_MAX_ERROR_STRING: 256 in Open MPI, 512 in MPICH
)

// load finds MPI and its ABI.
func load() (*abi, error) {
	l, err := foreign.Find("mpi")
	if err != nil {
		return nil, fmt.Errorf("mpi: %w: install Open MPI or MPICH, or name the library by LOCKSTEP_MPI", err)
	}
	a := &abi{library: l}
	for name, at := range map[string]*uintptr{
		"MPI_Initialized": &a.f.initialized, "MPI_Init_thread": &a.f.initThread, "MPI_Query_thread": &a.f.queryThread,
		"MPI_Finalized": &a.f.finalized, "MPI_Finalize": &a.f.finalize,
		"MPI_Comm_rank": &a.f.commRank, "MPI_Comm_size": &a.f.commSize, "MPI_Comm_split": &a.f.commSplit,
		"MPI_Comm_free":           &a.f.commFree,
		"MPI_Comm_set_errhandler": &a.f.setErrhandler, "MPI_Error_string": &a.f.errorString,
		"MPI_Iallreduce": &a.f.iallreduce, "MPI_Ireduce": &a.f.ireduce, "MPI_Ibcast": &a.f.ibcast,
		"MPI_Iallgatherv": &a.f.iallgatherv,
		"MPI_Igatherv":    &a.f.igatherv, "MPI_Iscatterv": &a.f.iscatterv, "MPI_Ireduce_scatter": &a.f.ireduceScatter,
		"MPI_Ialltoallv": &a.f.ialltoallv, "MPI_Ibarrier": &a.f.ibarrier, "MPI_Isend": &a.f.isend, "MPI_Irecv": &a.f.irecv,
		"MPI_Test": &a.f.test,
	} {
		if *at, err = l.Symbol(name); err != nil {
			return nil, fmt.Errorf("mpi: %s (%s) has no %s, which MPI 3.0 added: %w", l.Path, l.Version, name, err)
		}
	}
	if _, err := l.Symbol("ompi_mpi_comm_world"); err == nil {
		return a, a.openMPI()
	}
	for _, kin := range []string{"MPICH", "MVAPICH", "Intel", "CRAY"} {
		if strings.Contains(strings.ToUpper(l.Version), strings.ToUpper(kin)) {
			a.mpich()
			return a, nil
		}
	}
	return nil, fmt.Errorf("mpi: %s is %q, which is not supported: want Open MPI, or MPICH or one of its derivatives",
		l.Path, l.Version)
}

// openMPI reads the addresses of Open MPI's objects (ompi/include/mpi.h: OMPI_PREDEFINED_GLOBAL).
func (a *abi) openMPI() error {
	a.types, a.ops = map[tensor.DType]uintptr{}, map[collective.ReduceOp]uintptr{}
	var err error
	object := func(name string) (p uintptr) {
		if err == nil {
			if p, err = a.library.Symbol(name); err != nil {
				err = fmt.Errorf("mpi: %s (%s) has no %s: %w", a.library.Path, a.library.Version, name, err)
			}
		}
		return p
	}
	a.world, a.errorsReturn = object("ompi_mpi_comm_world"), object("ompi_mpi_errors_return")
	for d, name := range map[tensor.DType]string{
		tensor.Int8: "int8_t", tensor.Int16: "int16_t", tensor.Int32: "int32_t", tensor.Int64: "int64_t",
		tensor.Uint8: "uint8_t", tensor.Uint16: "uint16_t", tensor.Uint32: "uint32_t", tensor.Uint64: "uint64_t",
		tensor.Float32: "float", tensor.Float64: "double",
	} {
		a.types[d] = object("ompi_mpi_" + name)
	}
	for op, name := range map[collective.ReduceOp]string{
		collective.Sum: "sum", collective.Prod: "prod",
		collective.Min: "min", collective.Max: "max",
	} {
		a.ops[op] = object("ompi_mpi_op_" + name)
	}
	return err
}

// mpich sets the constants of the MPICH ABI (mpi.h: MPI_COMM_WORLD and so on).
func (a *abi) mpich() {
	a.world, a.errorsReturn, a.statusIgnore = 0x44000000, 0x54000001, 1
	a.types = map[tensor.DType]uintptr{
		tensor.Int8: 0x4c000137, tensor.Int16: 0x4c000238, tensor.Int32: 0x4c000439, tensor.Int64: 0x4c00083a,
		tensor.Uint8: 0x4c00013b, tensor.Uint16: 0x4c00023c, tensor.Uint32: 0x4c00043d, tensor.Uint64: 0x4c00083e,
		tensor.Float32: 0x4c00040a, tensor.Float64: 0x4c00080b,
	}
	a.ops = map[collective.ReduceOp]uintptr{
		collective.Max: 0x58000001, collective.Min: 0x58000002,
		collective.Sum: 0x58000003, collective.Prod: 0x58000004,
	}
}
