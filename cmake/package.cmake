# What is installed, and the Debian package made of it: ninja && cpack (in the build folder).
include(GNUInstallDirs)
set(CMAKE_SKIP_INSTALL_ALL_DEPENDENCY ON) # of all that is built, only the three programs are installed
install(TARGETS muster musterd muster-worker RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(FILES deploy/systemd/musterd.service deploy/systemd/muster-worker@.service DESTINATION lib/systemd/system)
install(FILES deploy/systemd/muster.sysusers DESTINATION lib/sysusers.d RENAME muster.conf)
install(FILES deploy/systemd/musterd.conf deploy/systemd/worker.conf DESTINATION /etc/muster)
install(DIRECTORY docs/ DESTINATION ${CMAKE_INSTALL_DOCDIR} FILES_MATCHING PATTERN "*.md")
install(DIRECTORY examples deploy/slurm DESTINATION ${CMAKE_INSTALL_DOCDIR})

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME muster)
set(CPACK_PACKAGE_VENDOR "Muster")
set(CPACK_PACKAGE_CONTACT "Muster developers <muster@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "elastic, fault-tolerant, bit-exact training on bare metal")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION net)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_DEPENDS systemd) # systemd-sysusers makes the user
set(CPACK_DEBIAN_PACKAGE_RECOMMENDS openssh-client) # muster launch
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
foreach(file conffiles postinst prerm postrm)
  list(APPEND CPACK_DEBIAN_PACKAGE_CONTROL_EXTRA ${CMAKE_SOURCE_DIR}/deploy/debian/${file})
endforeach()
include(CPack)
